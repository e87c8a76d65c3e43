"""Evidence: turns the ranked lists of many searches into one list of nodes with provenance (``gathering``).

candidates (deduplicated) ─▶ reranking ─▶ fusion, each sub-query's best covered ─▶ postprocessing ─▶ arrangement
"""
