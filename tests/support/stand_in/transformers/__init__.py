"""Makes the calls of MLflow of Transformers' Trainer, where Transformers is not installed."""

from transformers.trainer import Trainer as Trainer, TrainingArguments as TrainingArguments
