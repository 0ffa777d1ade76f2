"""GPT-NeoX and Pythia for modulm."""
