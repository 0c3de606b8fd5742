"""The review of a run file as an experienced person would read it, before anything is built.

``review`` has what a rule is given (``Review``) and what it gives (``Finding``); ``preflight`` lists the rules and asks
each of them. The rules stand by their subjects: ``batches``, ``model_and_text``, ``numbers``, ``optimizer``.
"""
