"""Quest and ClusterKV: approximate attention for models that attend to every token. Answers differ from dense attention.

    quest, clusterkv    what is kept of the keys of a unit of tokens, and the scores of units
    selector            the tokens that a query attends to, by these scores
    selectors           the selector of a model, by its name

Everything else in the engine is exact: DeepSeek's index (`models/indexer.py`) is a part of the model.
"""
