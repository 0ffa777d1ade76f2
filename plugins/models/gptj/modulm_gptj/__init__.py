"""GPT-J and CodeGen for modulm."""
