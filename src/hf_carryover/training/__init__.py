"""How is a drafter made? Texts, rehearsed rounds, losses and the trainer that joins them."""

from hf_carryover.training.arguments import CarryoverTrainingArguments
from hf_carryover.training.data import Example, read_examples
from hf_carryover.training.datalog import DataArguments
from hf_carryover.training.recipe import RecipeArguments, read_recipe, train_drafter
from hf_carryover.training.selfchat import TargetWriter, make_data
from hf_carryover.training.server import ServerWriter
from hf_carryover.training.trainer import CarryoverTrainer

__all__ = [
    "CarryoverTrainer",
    "CarryoverTrainingArguments",
    "DataArguments",
    "Example",
    "RecipeArguments",
    "ServerWriter",
    "TargetWriter",
    "make_data",
    "read_examples",
    "read_recipe",
    "train_drafter",
]
