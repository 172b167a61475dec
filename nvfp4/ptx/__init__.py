"""PTX instructions: for each a lowering for the card and, beside it, a model for the simulator."""
