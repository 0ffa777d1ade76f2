"""OLMo 1, 2 and 3, OLMoE and FlexOlmo for modulm."""
