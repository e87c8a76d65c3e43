"""The HTTP server (extra ``server``): Azure AI Search's and Google's APIs, and MCP, over knowledge bases.

app           the application: routes, health, metrics
http          what every request passes: ids, limits, headers, logs; what all routes share
access        API keys, bearer tokens, rates, principals
azure         ``retrieve``, its events, and definitions
page          the page, and the passages that it shows
service       the knowledge bases, built from definitions
catalog       definitions and API keys in SQL
configuration the file of ``agentic-kb serve``
"""
