"""Codecs: messages of other contracts, read into and written from the models of ``schema``. No HTTP, no engine.

* ``google_answer``: Google's Answer method (Discovery Engine v1, JSON): questions in, answers out, whole or streamed.
* ``google_sessions`` and ``google_checks``: the messages of the session methods, of CheckGrounding and of Rank.
* ``google_names`` and ``google_filter``: resource names and filter text.
* ``azure_request``: requests of older versions of Azure's ``retrieve`` action. These three need no further package.

The rest needs the extra ``google``: protobuf's own JSON and Google's message classes, loaded at the first call.
"""
