"""Predictions on networks that are not at hand: what ``hvd-compress plan`` computes and compares with real steps.

It works on descriptions: tables of parameters, rates of links, costs of a codec that it measures by itself. No job has
to run, and no engine.
"""
