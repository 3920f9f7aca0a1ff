"""Scheduling, sampling and the step loop: from requests to tokens."""
