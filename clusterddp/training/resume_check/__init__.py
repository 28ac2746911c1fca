"""What ranks record of each step under ``submit --check-resume``; the records are compared in cli/resume_check/."""
