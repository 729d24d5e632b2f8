"""Tool calls and reasoning out of the text of answers, as it comes."""
