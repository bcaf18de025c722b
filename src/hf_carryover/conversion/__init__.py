"""How do drafters travel between formats? Public ones in, ours out; nothing guessed, nothing silently dropped."""

from hf_carryover.conversion.loading import load_dflash, load_drafter
from hf_carryover.conversion.saving import FORMATS, convert_drafter
from hf_carryover.conversion.vocabulary import restrict_vocabulary

__all__ = ["FORMATS", "convert_drafter", "load_dflash", "load_drafter", "restrict_vocabulary"]
