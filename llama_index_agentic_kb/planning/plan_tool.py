"""The plan as the arguments of a tool, for models that call tools and know no structured output."""

from __future__ import annotations

from typing import Any

from llama_index.core.tools import FunctionTool
from pydantic import BaseModel, Field, create_model

from llama_index_agentic_kb.planning.classification import PART, ClassificationSpec, classification_model

__all__ = ["plan_tool"]


class _PlannedQuery(BaseModel):
    id: str = Field(description="q1, q2, ...")
    query: str = Field(description="One standalone search.")
    sources: list[str] = Field(description="Names of the sources to search.")
    depends_on: list[str] = Field(default_factory=list, description="Ids of the sub-queries that it builds on.")
    filter: str = Field(default="", description="An OData filter over fields that its sources list, or empty.")
    finds: str = Field(default="", description="What its answer is, as a noun phrase in the question's own words.")


class _Plan(BaseModel):
    sub_queries: list[_PlannedQuery]


def _plan_model(spec: ClassificationSpec | None) -> type[BaseModel]:
    """Give the arguments of the tool that takes a plan, the question's classes first where they are asked for."""
    if spec is None:
        return _Plan
    parts: dict[str, Any] = {PART: (classification_model(spec), ...), "sub_queries": (list[_PlannedQuery], ...)}
    return create_model("_Plan", **parts)


def plan_tool(spec: ClassificationSpec | None) -> FunctionTool:
    """Give the tool that takes a plan.

    Args:
        spec: What the question is classified as too; None is nothing.
    """
    return FunctionTool.from_defaults(
        fn=_submit_plan, name="query_plan", description="Submit the plan.", fn_schema=_plan_model(spec)
    )


def _submit_plan(**_: Any) -> None:
    """Never runs: the call's arguments are what is wanted."""
