"""What runs inside every rank: joining, attaching a plan, exchanging, recording."""
