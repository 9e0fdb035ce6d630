"""A message names the first problems and says how many more there are."""

from grpo_lightning.core.log_messages import MAX_NAMED, bullet_list


def test_few_are_all_named():
    assert bullet_list([]) == ""
    assert bullet_list(["a", "b"]) == "- a\n- b"
    assert bullet_list([str(n) for n in range(MAX_NAMED)]).splitlines()[-1] == f"- {MAX_NAMED - 1}"


def test_a_list_has_an_end():
    lines = bullet_list([str(n) for n in range(MAX_NAMED + 5)]).splitlines()
    assert len(lines) == MAX_NAMED + 1
    assert lines[-2:] == [f"- {MAX_NAMED - 1}", "- and 5 more."]
