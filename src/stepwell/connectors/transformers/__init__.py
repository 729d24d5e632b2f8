"""Prompts of Hugging Face Transformers models, resumed from host memory or a store. `PromptCache` is all that a user needs."""

from stepwell.connectors.transformers.prefill import Prefilled
from stepwell.connectors.transformers.prompt_cache import PromptCache

__all__ = ["Prefilled", "PromptCache"]
