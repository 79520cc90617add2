"""How processes find each other and communicate."""
