"""Codecs between the models of ``schema`` and the JSON messages of other APIs. They need no HTTP and no engine.

* ``azure``: Azure's ``retrieve`` action in five API versions.
* ``google``: Google's Answer and session methods, CheckGrounding and Rank (Discovery Engine v1, JSON).
* ``google_messages`` and ``google_filter``: protobuf's JSON and resource names; filter text.

Google's messages need the extra ``google``: protobuf's JSON and Google's message classes, imported at first use.
"""
