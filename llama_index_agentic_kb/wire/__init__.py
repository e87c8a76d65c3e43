"""Codecs: other contracts' messages, read into and written from the models of ``schema``. No HTTP, no engine.

One family of modules a contract:

* ``google_answer``: Google's Answer, Session, CheckGrounding and Rank messages (Discovery Engine v1, JSON).
  ``google_answer_request`` reads questions, ``google_stream`` writes streamed answers, ``google_sessions`` and
  ``google_checks`` the other methods' messages, ``google_names`` resource names, ``google_filter`` filter text,
  ``google_errors`` error bodies.
"""
