"""The verbs `evaluate` and `finetune`, and what both print of trainings."""
