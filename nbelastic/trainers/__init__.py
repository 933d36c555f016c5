"""Parts that the integrations of trainers have in common; imports no trainer."""
