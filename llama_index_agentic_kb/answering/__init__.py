"""Answering: the ``Answer`` resource, made of a retrieval, a synthesis and their check.

- ``engine.AnswerEngine``: the way of an ``AnswerQuery``; ``policy``: when there is no answer.
- ``results``: references, steps, the resource and its pieces; ``supplied_results``: evidence that the asker brings.
- ``related``: related questions; ``sessions``: turns, and sessions as a LlamaIndex memory.
"""
