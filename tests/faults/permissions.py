"""Permissions. (Being written by helper C.)"""
