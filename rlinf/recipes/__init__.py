"""Recipes that train language and vision-language models: configuration, data, rewards and loops."""
