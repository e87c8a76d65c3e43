"""Planning: from a conversation to the searches that find its evidence."""

from llama_index_agentic_kb.planning.classification import ClassificationSpec
from llama_index_agentic_kb.planning.effort import DEFAULT_LIMITS, EffortLimits
from llama_index_agentic_kb.planning.planner import Planner, Planning
from llama_index_agentic_kb.planning.scope import Scope

__all__ = ["DEFAULT_LIMITS", "ClassificationSpec", "EffortLimits", "Planner", "Planning", "Scope"]
