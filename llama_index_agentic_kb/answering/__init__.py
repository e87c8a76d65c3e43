"""Answering: the ``Answer`` resource, built from a retrieval, a synthesis and a grounding check.

- ``engine.answer_query``: runs an ``AnswerQuery``; ``policy``: the reasons to withhold an answer.
- ``results``: evidence from the caller, references, steps, the resource and its stream pieces.
- ``sessions``: turns, and sessions as a LlamaIndex memory.
"""
