"""Planning: from a conversation to the searches that find its evidence.

    scope ─▶ planner (a model's reply ─▶ plan_graph) ─▶ rounds (search ─▶ findings ─▶ search … ─▶ verdict)

``rounds`` is the loop; ``effort`` limits it. ``classification`` judges the question in the planner's call.
"""

from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.planning.effort import DEFAULT_LIMITS, EffortLimits
from llama_index_agentic_kb.planning.scope import Scope

__all__ = ["DEFAULT_LIMITS", "ClassificationSpec", "EffortLimits", "Scope"]
