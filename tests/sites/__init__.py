"""Real sites: what their documentation says of sbatch there, and what ``submit`` sends.

Each folder is a site. ``nodes.txt``, ``partitions.txt`` and ``config.txt`` have the form of ``scontrol show``, and
``qos.txt`` that of sacctmgr. There are fewer nodes than at the site, and names of partitions that a site keeps to
itself are invented. ``config.yaml`` is the user's configuration file. The module says what the site's plugins refuse
and where they route a job, what the user types, and what must be in the batch script. ``ACCEPTED`` and ``REFUSED`` are
from the site's pages, not from what we send. We have run nothing at these sites.
"""
