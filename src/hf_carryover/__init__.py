"""Carryover Drafting for Hugging Face Transformers: what the target computed for rejected guesses helps the next."""

from hf_carryover.acceptance import DraftStats, Round
from hf_carryover.cache_carryover import CarryoverCache
from hf_carryover.configuration_carryover import CarryoverDrafterConfig
from hf_carryover.conversion import load_dflash, load_drafter
from hf_carryover.decoding import install, uninstall
from hf_carryover.drafting import CarryoverCandidateGenerator
from hf_carryover.modeling_carryover import CarryoverDrafterModel
from hf_carryover.streaming import StreamedToken, TokenStreamer, stream_tokens
from hf_carryover.targets import load_target

__all__ = [
    "CarryoverCache",
    "CarryoverCandidateGenerator",
    "CarryoverDrafterConfig",
    "CarryoverDrafterModel",
    "DraftStats",
    "Round",
    "StreamedToken",
    "TokenStreamer",
    "install",
    "load_dflash",
    "load_drafter",
    "load_target",
    "stream_tokens",
    "uninstall",
]
