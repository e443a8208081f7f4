"""A config does not say to which server the user's key is sent."""

import pytest

from torchtune_cp.errors import UserError
from torchtune_cp.metrics import WandBLogger


@pytest.mark.parametrize("name", ["base_url", "api_key"])
def test_a_config_cannot_send_the_users_key_to_a_server_of_its_own(name: str) -> None:
    with pytest.raises(UserError, match=f"metric_logger.settings.{name}: a config does not choose"):
        WandBLogger(settings={name: "http://127.0.0.1:9"}, mode="disabled")
