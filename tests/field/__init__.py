"""What APIs, models, people and peers' suites sent: cases whose expected value is what a user expects."""
