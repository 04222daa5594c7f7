"""The same run with TRL's GRPOTrainer."""
