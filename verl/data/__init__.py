"""Data: files to Tasks, Tasks to token ids, and an order of Tasks that can be taken up again."""

from verl.data.chat import describe_row, encode_answer, encode_messages, encode_prompt
from verl.data.config import DataConfig
from verl.data.dataset import PromptDataset, RewardDataset, as_tasks
from verl.data.loader import RLDataLoader
from verl.data.order import Sampler, shard
from verl.data.rows import kind_of

__all__ = ["DataConfig", "PromptDataset", "RLDataLoader", "RewardDataset", "Sampler", "as_tasks", "describe_row",
           "encode_answer", "encode_messages", "encode_prompt", "kind_of", "shard"]
