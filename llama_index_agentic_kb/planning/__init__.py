"""Planning: from a conversation to the searches that find its evidence.

    scope ─▶ planner (a model's reply ─▶ parsing ─▶ plan_graph) ─▶ rounds (steps ─▶ findings ─▶ … ─▶ revision)

``rounds`` is the loop; ``effort`` limits it, and ``model_calls`` holds what every call of the model shares.
``classification`` judges the question in the planner's call, ``signals`` decides at auto effort whether to plan.
"""

from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.planning.effort import DEFAULT_LIMITS, EffortLimits
from llama_index_agentic_kb.planning.planner import Planner, Planning
from llama_index_agentic_kb.planning.scope import Scope

__all__ = ["DEFAULT_LIMITS", "ClassificationSpec", "EffortLimits", "Planner", "Planning", "Scope"]
