"""Planning: turns a conversation into the searches that find evidence for its question.

    scope ─▶ planner (a model's reply ─▶ plan_graph) ─▶ rounds (search ─▶ findings ─▶ search … ─▶ verdict)

``rounds`` is the search loop; ``effort`` limits it. The planner's call also classifies the question.
"""

from llama_index_agentic_kb.planning.effort import DEFAULT_LIMITS, EffortLimits
from llama_index_agentic_kb.planning.scope import ClassificationSpec, Scope

__all__ = ["DEFAULT_LIMITS", "ClassificationSpec", "EffortLimits", "Scope"]
