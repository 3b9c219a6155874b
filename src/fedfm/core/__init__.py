"""What both halves of a method touch: clients, federation, method, checks of replies, the transcript."""
