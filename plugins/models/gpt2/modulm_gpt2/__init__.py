"""GPT-2 and its kin, GPT-Neo and StarCoder, for modulm."""
