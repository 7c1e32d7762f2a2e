"""Hostile inputs for every door, each made from its number alone, and what must hold whatever comes."""
