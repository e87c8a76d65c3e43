"""The HTTP server (extra ``server``): Azure AI Search's and Google's APIs, and MCP, over knowledge bases.

app           the application: routes, the page, health, metrics; the file of ``agentic-kb serve``
http          what every request passes: ids, limits, headers, logs; what all routes share
access        API keys, bearer tokens, principals; rates, and the queue of questions
azure, google ``retrieve``, its events, passages, definitions; Google's methods
service       the knowledge bases, built from definitions
catalog       definitions and API keys in SQL
"""
