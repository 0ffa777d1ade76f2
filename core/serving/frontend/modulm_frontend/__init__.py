"""The front end: turns prompts into engine requests and tokens back into text."""
