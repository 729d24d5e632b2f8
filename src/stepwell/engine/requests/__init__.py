"""What is asked and how far it has come: requests, the text of their answers, and the grammar that an answer follows."""
