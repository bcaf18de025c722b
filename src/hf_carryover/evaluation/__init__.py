"""What is a drafter worth, on this target and these prompts? `evaluate` measures it and writes the report."""

from hf_carryover.evaluation.plan import EvaluationArguments
from hf_carryover.evaluation.protocol import evaluate
from hf_carryover.evaluation.report import results_table
from hf_carryover.evaluation.summary import problems

__all__ = ["EvaluationArguments", "evaluate", "problems", "results_table"]
