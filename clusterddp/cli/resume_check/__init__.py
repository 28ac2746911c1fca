"""``submit --check-resume``: whether resumes make a difference, from records of steps; training/ writes these."""
