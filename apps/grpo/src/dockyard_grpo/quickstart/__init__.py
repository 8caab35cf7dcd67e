"""The quickstart: a family of tiny repositories, the frozen tasks, and a warm-started tiny policy."""
