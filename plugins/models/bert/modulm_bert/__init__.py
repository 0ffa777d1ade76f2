"""BERT, RoBERTa, XLM-RoBERTa and ModernBERT for modulm."""
