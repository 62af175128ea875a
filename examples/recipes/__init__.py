"""Eight small trainings as people write them: what `recipe.py` trains, each with data, network and settings.

Data are those of scikit-learn and the text of the running Python. All that is drawn, batches included, comes from
torch's generator, which `recipe.py` seeds for every step and rank: so nothing depends on the method.
"""
