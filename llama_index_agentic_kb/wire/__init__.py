"""Codecs between the models of ``schema`` and the JSON messages of other APIs. They need no HTTP and no engine.

* ``azure``: Azure's ``retrieve`` action in five API versions.
* ``google_answer``: Google's Answer method (Discovery Engine v1, JSON): parser of requests, encoder of answers.
* ``google_methods``: the messages of the session methods, of CheckGrounding and of Rank.
* ``google_names`` and ``google_filter``: resource names and filter text.

Google's messages need the extra ``google``: protobuf's JSON and Google's message classes, imported at first use.
"""
