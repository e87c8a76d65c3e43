"""Answering: the ``Answer`` resource, made of a retrieval, a synthesis and their check.

- ``front.AnswerQueries``: the methods of a knowledge base; ``engine.AnswerEngine``: the way of an ``AnswerQuery``.
- ``policy``, ``relevance``: when no answer is given.
- ``references``, ``steps``: what was found, and how.
- ``resource.make_answer``: all of it put together.
- ``turns``, ``session_memory``: sessions.
"""
