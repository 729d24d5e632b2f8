"""Resumes prompts of Hugging Face Transformers models from host memory or a store, through `PromptCache`."""

from stepwell.connectors.transformers.prefill import Prefilled
from stepwell.connectors.transformers.prompt_cache import PromptCache

__all__ = ["Prefilled", "PromptCache"]
