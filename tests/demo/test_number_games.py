"""The number game in words: its rows."""

import json
import re
from pathlib import Path

import pytest
import yaml

from grpo_lightning.demo.number_games import NumberGames
from grpo_lightning.environments import GuessTheNumber
from tests.helpers.paths import RECIPES

RECIPE = RECIPES / "guess_number_qwen2.5_1.5b.yaml"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_number_is_in_the_range_of_the_question_and_no_game_occurs_twice(tmp_path):
    NumberGames(str(tmp_path / "games"), size=18, heldout_size=6, num_numbers=4, num_ranges=6, seed=0)()
    games = [*rows(tmp_path / "games" / "train.jsonl"), *rows(tmp_path / "games" / "heldout.jsonl")]
    assert len({json.dumps(game) for game in games}) == len(games) == 24  # all games that there are
    for game in games:
        first, last = map(int, re.findall(r"\d+", game["question"]))
        assert 1 <= first <= 6
        assert last == first + 3
        assert first <= game["number"] <= last


def test_halving_the_range_finds_every_number_of_the_recipe(tmp_path):
    """With the observations and the number of guesses of the recipe, which its question names too."""
    config = yaml.safe_load(RECIPE.read_text())
    settings = config["model"]["environment"]["init_args"]
    assert f"at most {settings['max_guesses']} guesses" in config["data"]["question_template"]
    assert config["model"]["conversation"]["max_turns"] == settings["max_guesses"]
    NumberGames(str(tmp_path / "games"), size=300, heldout_size=1, seed=0)()
    numbers_of_guesses = set()
    for game in rows(tmp_path / "games" / "train.jsonl"):
        first, last = map(int, re.findall(r"\d+", game["question"]))
        environment, step = GuessTheNumber(**settings), None
        environment.reset(game["number"])
        while step is None or not step.done:
            guess = (first + last) // 2
            step = environment.step(f"The range is {first} to {last}. I guess {guess}.")
            first, last = (guess + 1, last) if step.observation == settings["higher"] else (first, guess - 1)
        assert step.reward == 1.0
        numbers_of_guesses.add(step.metrics["guesses"])
    assert max(numbers_of_guesses) == settings["max_guesses"]  # one guess less would not be enough


def test_files_are_kept_until_a_setting_changes(tmp_path):
    folder = tmp_path / "games"
    NumberGames(str(folder), size=5, heldout_size=1, seed=0)()
    first = (folder / "train.jsonl").read_text()
    (folder / "train.jsonl").write_text("")
    NumberGames(str(folder), size=5, heldout_size=1, seed=0)()
    assert (folder / "train.jsonl").read_text() == ""
    NumberGames(str(folder), size=6, heldout_size=1, seed=0)()
    assert len(rows(folder / "train.jsonl")) == 6
    NumberGames(str(folder), size=5, heldout_size=1, seed=0)()
    assert (folder / "train.jsonl").read_text() == first


@pytest.mark.parametrize("name", ["size", "heldout_size", "num_numbers", "num_ranges"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        NumberGames("games", **{name: 0})


def test_more_rows_than_games_are_refused():
    NumberGames("games", size=11, heldout_size=1, num_numbers=4, num_ranges=3)
    with pytest.raises(ValueError, match="size 11 and heldout_size 2 are more than the 12 different games"):
        NumberGames("games", size=11, heldout_size=2, num_numbers=4, num_ranges=3)
