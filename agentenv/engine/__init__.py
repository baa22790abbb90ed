"""Engines take token ids and return exactly the sampled tokens with their log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentenv.core.door import door

if TYPE_CHECKING:
    from agentenv.engine.answers import TooLong as TooLong
    from agentenv.engine.answers import bounded as bounded
    from agentenv.engine.answers import message_of as message_of
    from agentenv.engine.answers import read_bounded as read_bounded
    from agentenv.engine.ask import Answer as Answer
    from agentenv.engine.ask import TextModel as TextModel
    from agentenv.engine.exact import exact_completion as exact_completion
    from agentenv.engine.exact import padded as padded
    from agentenv.engine.exact import room_for as room_for
    from agentenv.engine.examination import examine_engine as examine_engine
    from agentenv.engine.examination import examine_model as examine_model
    from agentenv.engine.factory import check_options as check_options
    from agentenv.engine.factory import load_engine as load_engine
    from agentenv.engine.findings import EngineFinding as EngineFinding
    from agentenv.engine.forms import LoadedModel as LoadedModel
    from agentenv.engine.forms import ModelForm as ModelForm
    from agentenv.engine.forms import engine_registry as engine_registry
    from agentenv.engine.hf.engine import TransformersEngine as TransformersEngine
    from agentenv.engine.interface import ChatCompletion as ChatCompletion
    from agentenv.engine.interface import ChatEngine as ChatEngine
    from agentenv.engine.interface import Completion as Completion
    from agentenv.engine.interface import Engine as Engine
    from agentenv.engine.interface import Features as Features
    from agentenv.engine.interface import FinishReason as FinishReason
    from agentenv.engine.interface import Sampling as Sampling
    from agentenv.engine.interface import Usage as Usage
    from agentenv.engine.interface import features_of as features_of
    from agentenv.engine.interface import policy_of as policy_of
    from agentenv.engine.interface import refuse_grammar as refuse_grammar
    from agentenv.engine.reach import check_answers as check_answers
    from agentenv.engine.reach import require_no_password as require_no_password
    from agentenv.engine.scripted.mock import MockEngine as MockEngine
    from agentenv.engine.scripted.policy import PolicyEngine as PolicyEngine
    from agentenv.engine.scripted.scripted import ScriptedEngine as ScriptedEngine
    from agentenv.engine.scripted.scripted import ScriptedRequest as ScriptedRequest
    from agentenv.engine.scripted.scripted import ScriptedTurn as ScriptedTurn
    from agentenv.engine.stops import Decoder as Decoder
    from agentenv.engine.stops import cut_at_stop as cut_at_stop
    from agentenv.engine.vllm.own import OwnServerEngine as OwnServerEngine
    from agentenv.engine.vllm.own import start_server as start_server
    from agentenv.engine.vllm.server import VLLMServerEngine as VLLMServerEngine
    from agentenv.engine.weights import HoldsModel as HoldsModel
    from agentenv.engine.weights import SyncReport as SyncReport
    from agentenv.engine.weights import WeightReader as WeightReader
    from agentenv.engine.weights import check_sync as check_sync
    from agentenv.engine.weights import push_weights as push_weights

__all__ = door(__name__)
