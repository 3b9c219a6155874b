"""Types that both halves of a method use: clients, federation, method, checks of replies, the transcript."""
