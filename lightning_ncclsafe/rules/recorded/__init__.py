"""Causes that dumps and logs show after a run: nobody was asked, and no Python stack was taken."""
